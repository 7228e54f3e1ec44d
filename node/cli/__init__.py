"""The command line. Start with `app.py`; `remote.py` asks a running peer, `local.py` reads files on this machine."""
