# Removes all norms. Add it to any experiment:
#   python train.py config/train_tinystories.py config/ablate_no_norm.py
norm = 'none'
qk_norm = False
