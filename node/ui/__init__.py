"""What a peer shows: logs, the terminal views, and the control socket that `status` and `finish` use."""
