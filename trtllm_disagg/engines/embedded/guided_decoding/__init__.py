"""Guided decoding: grammars, and the masks that they give."""
