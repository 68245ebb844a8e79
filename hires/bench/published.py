"""Numbers that the thesis on MPI4DL publishes, to stand beside ours."""

TABLE_2_1 = {"fp32": (12.48, 145.22), "fp16": (7.64, 224.85), "bf16": (5.28, 226.12)}
"""GB and images per second of its "ResNet101" (``mpi4dl_resnet``) on one A100, inference of 256x256
images in batches of 64. The convolutions of its FP32 ran in TF32, torch's default."""
