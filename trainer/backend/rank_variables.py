"""Environment variables of a trainer rank. Imports no torch."""

STORE_FILE = "TANDEM_RANK_STORE"
"""File in which the ranks of one machine meet. Without it they meet at torchrun's MASTER_ADDR and MASTER_PORT."""

RANK_VARIABLES = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", STORE_FILE}
)
"""Everything that makes a process a rank."""
