"""How processes on one machine start, talk, share memory, show what they do, and end."""
