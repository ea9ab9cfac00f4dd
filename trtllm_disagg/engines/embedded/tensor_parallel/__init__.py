"""Tensor parallelism: one model over several processes (ranks), each with a part of the weights and of the KV heads.

Rank 0 is the engine core: it alone knows requests. For each step it tells the other ranks which tokens run and where
their KV lies. All ranks run the same forward, each over its part of the weights (`team.py`), and gather the results in
mpi4py collectives (`group.py`). Between steps the others (`follower.py`) sleep on a socket, since an MPI receive would
spin.
"""
