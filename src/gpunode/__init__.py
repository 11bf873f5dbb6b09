"""gpunode: the GPU layer of a Kubernetes cluster, from the device to the gang that runs on it."""
