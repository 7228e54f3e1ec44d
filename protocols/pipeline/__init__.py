"""SWARM pipeline routing: a model in stages, each stage held by several unreliable replicas (Ryabinin et al. 2023).

A peer of stage 0 drives: it draws microbatches and calls one replica of every other stage itself. Read `driving` first,
then `serving`; `admission` and `routing` decide, without I/O; `job` has the verbs of a stage.
"""
