"""MPS (NVIDIA's Multi-Process Service): one control daemon for each set of devices that is shared through it.

The daemons must outlive the agent, or every restart of it would end the CUDA contexts of all pods that share a GPU.
So a small process of its own keeps them: `keeper`, with one `daemon` for each file of `files` that says what is wanted.
`control` is the agent's side: it writes what is wanted and reads what has become of it. `launch` puts a daemon into
its place. Facts about the daemon are from NVIDIA's "Multi-Process Service" documentation.
"""
