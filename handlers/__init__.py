"""How a worker answers a request: phases (local, remote), their composition (chain), and what a worker serves.

Lives in the top-level folder `handlers/`, imported as `trtllm_disagg.handlers` (docs/explanation/structure.md).
"""

if __name__ != "trtllm_disagg.handlers":
    # A second copy under another name would have classes that are not the same classes.
    raise ImportError("import this package as trtllm_disagg.handlers")
