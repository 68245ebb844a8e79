complete -c hires -a '(hires _complete (commandline -opc)[2..] (commandline -ct))'
