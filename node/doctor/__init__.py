"""`starling doctor`: what is wrong with this machine, its network and its run. Begin with `findings.py`.

Probes gather facts (`machine_probes.py`, `helpers.py`, `run.py`); pure checks turn facts into lines, each with what to
do (`machine.py`, `network.py`). `dial_back.py` is the side of the peers that help. `node.session.examination` runs all.
"""
