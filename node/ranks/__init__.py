"""One peer on several devices: ranks, each a process with a device, that take each inner step together.

Start with `group.py` (the processes), then `zero.py` (ZeRO on the flat vector) or `dtensors.py` (FSDP2, tensor
parallel); `cluster.py` is for ranks on several machines. The rest of the peer sees one worker and one flat vector, and
never learns how many ranks there are.
"""
