"""The one error that the cluster package shows to people."""


class ClusterError(Exception):
    """Something about the local cluster is wrong; the message is one sentence saying what and what to do."""
