"""The process of the kernel: what a judge asks it, and how it is started, limited and ended."""
