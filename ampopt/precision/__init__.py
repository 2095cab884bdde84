"""Which modules and operators run in which dtype, in addition to ``torch.autocast``."""
