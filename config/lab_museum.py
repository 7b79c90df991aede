question = 'What does a mistake look like?'
# Runs common mistakes and a healthy run, to show how their loss curves look.
#   python bench.py config/lab.py config/lab_museum.py --dataset=my_text.txt
# Answer: forgetting zero_grad costs 0.36 and looks like a slow run. Without a causal mask, the loss falls to 0.04,
# which is too good to be true. The curve of float16 without scaling nearly coincides with the healthy one (seed 1).
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
float16 without scaling: --dtype=float16 config/broken_no_scale.py
'''
