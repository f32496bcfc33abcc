"""How a long computation tells how far it is."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with the name of what is done, the parts that are done, and the parts in all."""

Say = Callable[[str], None]
"""Called with one line on what is being done."""
