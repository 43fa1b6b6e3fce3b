"""A NaN in the first channel of a pixel reaches the pixel before it: a 1x1 convolution in bf16, an odd number of channels.

torch 2.13 and 2.15 on a CPU with AVX512-BF16 and without AMX.
Needs torch alone.  Exit status: 1 the failure is there, 0 it is not.
"""
import sys
import torch

wrong = 0
for channels in (40, 41, 42, 43, 47, 48):
    x = torch.rand(1, channels, 4, 4).bfloat16().to(memory_format=torch.channels_last)
    x[0, 0, 1, 2] = float("nan")
    with torch.no_grad():
        result = torch.nn.functional.conv2d(x, torch.rand(8, channels, 1, 1).bfloat16())
    pixels = result.isnan().any(1)[0].nonzero().tolist()
    if pixels != [[1, 2]]:
        wrong += 1
        print(f"{channels} channels: NaN in pixel [1, 2] of the input, and in pixels {pixels} of the result")
sys.exit(int(wrong > 0))
