"""The names by which users select the backend."""

NAME = "mla_backend"
"""In --attention-backend and the options for one phase or for drafts."""

DSA_VARIABLE = "MLA_BACKEND_DSA"
"""With 1 it asks for our kernels in SGLang's ``dsa`` backend."""

DSA_BACKENDS = {"dsa", "nsa"}
"""SGLang's names of that backend; the second one is deprecated."""
