"""Parameters that are sharded over ranks: DTensors, and what FSDP1 has flattened."""
