"""`python -m quantsink`."""

import sys

from quantsink.cli.main import main

sys.exit(main())
