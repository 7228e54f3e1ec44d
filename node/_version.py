"""The version of this code. A build writes its own in place of this one (`setup.py`)."""

VERSION = "0.2.0+checkout"
