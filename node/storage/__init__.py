"""What a peer keeps on its disk: checkpoints, certificates, its history, room for what is large."""
