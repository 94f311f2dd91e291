"""Code of our own for CUDA: the small parts of a decoder layer in one launch each (Triton).

Lives here: kernels, the operators that call them, the back end that hands them to the forward.
Must not live here: the noise and its choice (`engine.decoding`); anything without a torch body that says what it does.
"""
