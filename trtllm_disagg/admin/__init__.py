"""Commands that change running workers, and the key that signs them."""
