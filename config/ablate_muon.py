# Uses Muon for the matrices in the blocks. AdamW updates the other weights, with the same learning rate and without
# weight decay.
optimizer = 'muon'
adamw_scale = embed_scale = 1.0
