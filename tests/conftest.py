"""Tests see the plugins of this repository and no others that happen to be installed."""

import os

os.environ["RECD_NO_THIRD_PARTY"] = "1"
