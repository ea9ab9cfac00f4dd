"""How the two stages write a handoff into the bodies that they send each other (docs/protocols.md)."""
