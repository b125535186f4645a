"""Services as plain classes, and the policies they rest on: no MPI in here."""

__all__: list[str] = []
