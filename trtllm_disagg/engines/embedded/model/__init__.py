"""Loading a model, computing a step of it, and sampling from its logits."""
