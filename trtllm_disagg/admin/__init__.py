"""Commands that change a running worker, and the key that signs them."""
