"""What processes on one machine have to do with each other: how they start, talk, show what they do, and end."""
