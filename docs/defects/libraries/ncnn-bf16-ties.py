"""ncnn with use_bf16_storage rounds ties away from zero: 1 + 2^-8 becomes 1.0078125, to nearest even it is 1.

Needs ncnn alone.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys

import ncnn
import numpy as np

net = ncnn.Net()
net.opt.use_bf16_storage = True
net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = net.opt.use_fp16_packed = False
net.load_param_mem("7767517\n3 3\nInput a 0 1 a\nInput b 0 1 b\nGemm product 2 1 a b c\n")
net.load_model_mem(b"\0" * 16)
extractor = net.create_extractor()
a, b = np.array([[1, 2.0**-8]], np.float32), np.ones((2, 1), np.float32)  # a Mat shares their memory
extractor.input("a", ncnn.Mat(a))
extractor.input("b", ncnn.Mat(b))
made = extractor.extract("c")[1].numpy()[0, 0]
print(f"1 * 1 + 2^-8 * 1 in bf16: {made}")
sys.exit(int(made != 1))
