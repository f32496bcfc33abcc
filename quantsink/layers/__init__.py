"""The modules that replace a model's own: linear layers, experts, and the tables of attention modules.

Importing this package registers them (`layers.replacement`).
"""

from quantsink.layers import experts as experts
from quantsink.layers import linear as linear
from quantsink.layers import tables as tables
