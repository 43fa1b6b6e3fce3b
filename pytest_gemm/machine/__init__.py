"""The machine and its software: processor, instruction sets, GPUs, hardware key, versions."""
