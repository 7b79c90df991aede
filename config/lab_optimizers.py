question = 'What does the optimizer buy?'
# Each at rates around its best; weight decay only for the two that keep it out of the gradient. Three seeds.
#   python bench.py config/lab.py config/lab_optimizers.py --dataset=my_text.txt
what = 'compare'
out_dir = 'out/lab_optimizers'
picture = 'learning_rate'
variants = ''
for _name, _decay, _rates in (('adamw', 0.1, '5e-3 1e-2'), ('muon', 0.1, '5e-3 1e-2 2e-2'), ('adam', 0, '5e-3 1e-2'),
                              ('rmsprop', 0, '1e-3 3e-3 1e-2'), ('adagrad', 0, '1e-2 3e-2 0.1'),
                              ('momentum', 0, '0.1 0.3 1 3'), ('sgd', 0, '1 3 5 10')):
    for _rate in _rates.split():
        variants += f'{_name}, rate {_rate}: --optimizer={_name} --weight_decay={_decay} --learning_rate={_rate}\n'
