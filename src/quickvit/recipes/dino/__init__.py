"""What recipes of the DINO kind are made of: crops through a backbone, heads, targets, losses, and an eye on them."""
