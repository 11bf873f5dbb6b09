"""The kubelet's side of the node: registration, DRA and health services, prepared claims, CDI files.

`plugin` serves the sockets, `prepare` answers the calls with the book that `ledger` keeps, `reconcile` looks a second
time. What these need from elsewhere are the protocols in `seams`.
"""
