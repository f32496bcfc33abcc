"""`python -m quantsink`."""

import sys

from quantsink.cli import main

sys.exit(main())
