"""A volunteer's training node. From `starling join` to the mean of a round in five steps:

1. Command: `cli/app.py`. `join` reads the options and the state directory, and runs a peer until it is done.
2. Peer: `session/peer.py`. `Peer` starts p2pd and the worker, and finds or starts the run.
3. Session: `session/build.py` composes it; `PeerSession` (`peer_session.py`) runs rounds, and leaves in good order.
4. Outer loop: `outer/`. `ReplicatedOuterLoop` (`replicated_loop.py`), where all members share one outer state, or
   `IndependentOuterLoop` (`independent_loop.py`), where each peer has its own: train, average, step, report.
5. Averager: `protocols/butterfly/averager.py`, or another that `protocols/registry.py` names. `enter` opens a session
   of one round (`protocols/butterfly/round.py`); its `average` returns the mean.

Beside them: `joining/` finds the run, `membership/` the live peers, `training/` runs the worker, `storage/` the disk,
`doctor/` says what is wrong.
"""
