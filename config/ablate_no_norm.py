# What do the norms buy? Compose it with any experiment:
#   python train.py config/train_tinystories.py config/ablate_no_norm.py
norm = 'none'
qk_norm = False
