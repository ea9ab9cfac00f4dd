"""How a worker answers a request: the phases (local, remote), their composition (chain) and all around it (services).

Lives in the top-level folder `handlers/`, imported as `trtllm_disagg.handlers` (docs/explanation/structure.md).
"""

if __name__ != "trtllm_disagg.handlers":
    # Under a second name the modules would be loaded twice, with different classes.
    raise ImportError("import this package as trtllm_disagg.handlers")
