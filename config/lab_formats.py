question = 'What does half the memory cost?'
# Repeats the same training in float32, in bfloat16, and in float16 with and without loss scaling. With 16,384 tokens at
# once and a vocabulary of 10,000, the gradient of a logit is about 6e-9, which is 0 in float16.
#   python bench.py config/lab.py config/lab_formats.py --dataset=my_text.txt
# Answer: there is no difference to see on the AMD. float32 ends at 5.05 and bfloat16 at 5.12, with standard deviations
# of 0.27 and 0.19 over seeds. float16 has not been measured yet. On a CPU with only AVX2, a step
# takes 16 times as long in bfloat16 as in float32, and 20 times as long in float16.
what = 'compare'
out_dir = 'out/lab_formats'
vocab_size = 10_000
batch_size = 128
micro_batch_size = 128
max_iters = 36
warmup_iters = 4
log_interval = 1
learning_rate = 1e-2
variants = '''
float32: --dtype=float32
bfloat16: --dtype=bfloat16
float16: --dtype=float16
float16 without scaling: --dtype=float16 config/broken_no_scale.py
'''
