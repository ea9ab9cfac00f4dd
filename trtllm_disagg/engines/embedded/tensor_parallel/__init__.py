"""Tensor parallelism: one model over several processes (ranks), each with a part of the weights and KV heads.

Rank 0 is the engine core; only it knows requests. It sends each step's tokens and KV places to the other ranks. All
ranks run the same forward over their part of the weights (`team.py`), and gather results in mpi4py collectives
(`group.py`). Between steps the others (`follower.py`) sleep on a socket, since an MPI receive would spin.
"""
