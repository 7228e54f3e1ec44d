"""What a peer estimates of other peers: their round, how long an exchange takes, whether to avoid them."""
