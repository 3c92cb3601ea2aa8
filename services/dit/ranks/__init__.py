"""A pool of many ranks: its front in the service's process, and each rank in its own."""

ADDRESS = "CHITU_RANKS_ADDRESS"
"""Environment variable of a rank: where the front listens for it."""
SECRET = "CHITU_RANKS_SECRET"
"""Environment variable of a rank, and of a front whose ranks are on several hosts."""
CONFIG = "CHITU_RANKS_CONFIG"
"""Environment variable of a rank: file with the configuration; otherwise it takes overrides."""
