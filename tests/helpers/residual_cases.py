"""The GPU kernels of ResNet18: convolutions and group normalisation, one process for both."""

import convolution_3x3_cases
import group_norm_cases

if __name__ == "__main__":
    convolution_3x3_cases.main()
    group_norm_cases.main()
