"""Guided decoding: grammars, their trial compilation, and the masks that they give."""
