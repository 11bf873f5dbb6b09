"""The kubelet's gRPC messages, generated from the .proto files next to this one.

Regenerate from the repository root (a test compares the result with what is committed):

    python -m grpc_tools.protoc -I src --python_out=src --pyi_out=src src/gpunode/kubelet/proto/*.proto

Only messages are generated. The services are a handful of methods, named in `gpunode.kubelet.rpc`, so no stub
code is needed, nor the lower bound on grpcio that such code checks when it is imported.
"""
