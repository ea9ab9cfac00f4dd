"""Tensor parallelism: one model over several processes (ranks), each with a part of the weights and of the KV heads.

Rank 0 is the engine core: it alone knows requests. Per step it tells the other ranks which tokens run and where
their KV lies (`group.py`), and all of them run the same forward over their part, meeting in mpi4py collectives
(`group.py`). Between steps the others sleep on a socket, since an MPI receive would spin.
"""
