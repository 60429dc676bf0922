"""Claims that cannot be put to the test with what there is, and why."""

NOT_DONE = {
    "19": (
        "An orthonormal shared memory with a learned transform keeps output = pseudo-inverse of input "
        "(arXiv:2602.04556)",
        "no scheme keeps the matrix orthonormal during training: `spd_pair` has the transform and learns the matrix "
        "freely, so that the claim is not its own",
    ),
    "20, untied": (
        "Centring the output embeddings stops the drift of the logits of an untied model, too (arXiv:2601.02031)",
        "`centred` is a tied scheme; what is subtracted from all rows of an untied output matrix changes neither its "
        "loss nor its gradients, so that nothing but the logits' common part would be seen to change",
    ),
    "21, rare rows": (
        "Rare tokens gain by a head of their own, beside one matrix for the others (after arXiv:2601.22040)",
        "no scheme ties some rows and not others: the study `rare-tokens` has a second matrix for all rows instead",
    ),
    "22": (
        "Input and output want vocabularies of different sizes (arXiv:2501.16975)",
        "a stream has one vocabulary, which is that of its inputs and of its targets",
    ),
}
