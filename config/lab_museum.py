question = 'What does a mistake look like?'
# Runs common mistakes and a healthy run, to show how their loss curves look. For another mistake, float16 without loss
# scaling, see config/lab_formats.py.
#   python bench.py config/lab.py config/lab_museum.py --dataset=my_text.txt
# Answer (seed 1, AMD, AVX2): the healthy run ends at 3.127. Forgetting zero_grad costs 0.39 and looks like a slow run,
# a constant embedding costs 0.16, and a 100x rate costs 2.26. Without a causal mask, the loss falls to 0.04, which is
# too good to be true.
what = 'compare'
out_dir = 'out/lab_museum'
picture = 'curves'
seeds = 1
variants = f'''
healthy:
no zero_grad: config/broken_no_zero_grad.py
constant embedding: config/broken_constant_embedding.py
no causal mask: config/broken_no_mask.py
targets not shifted: config/broken_no_shift.py
rate x 100: --learning_rate={100 * learning_rate:g}
'''
