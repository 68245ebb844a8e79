"""Numbers that the thesis on MPI4DL publishes, to stand beside ours."""

TABLE_2_1 = {"fp32": (12.48, 145.22), "fp16": (7.64, 224.85), "bf16": (5.28, 226.12)}
"""GB and images per second of its "ResNet101" (``mpi4dl_resnet``) on one A100, inference of 256x256
images in batches of 64. The convolutions of its FP32 ran in TF32, torch's default."""

TABLE_2_2 = {
    "camelyon16": {"fp32": 70.27, "fp16": 70.26, "bf16": 70.32, "int8": 70.26},
    "imagenette": {"fp32": 75.87, "fp16": 75.87, "bf16": 75.9, "int8": 75.13},
    "imagenet": {"fp32": 77.62, "fp16": 77.57, "bf16": 78.41, "int8": 76.85},
    "cifar10": {"fp32": 86.02, "fp16": 86.05, "bf16": 86.04, "int8": 85.99},
}
"""Accuracy in per cent by data and precision. The value of ImageNet in BF16 is suspect: the
published script also casts the labels."""
